"""What all of Earshot agrees on: settings, requests and answers, errors, engines."""
