"""OpenAI's audio API before the models: routes, forms, answers, events, errors."""
