"""All of Earshot's agreements: settings, requests and answers, errors, engines."""
