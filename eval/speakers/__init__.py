"""Who said what: how right turns of speakers are, and what they cost, beside those of peers."""
