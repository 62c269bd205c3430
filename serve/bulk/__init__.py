"""Many files on many engines, by Ray Data: from a folder or an object store into shards of text."""
