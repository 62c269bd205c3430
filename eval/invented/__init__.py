"""What is written where nobody speaks, in short clips, and what is lost by not writing it."""
