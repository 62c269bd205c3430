"""Long recordings with known text: the words that systems lose, repeat and make up."""
