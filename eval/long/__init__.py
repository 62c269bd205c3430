"""Long recordings whose truth is known: what systems lose in them, repeat and make up."""
