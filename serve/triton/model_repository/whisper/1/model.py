"""The Triton models `whisper` and `whisper_stream`: what Triton calls, and what calls Triton.

Both are this file. `whisper` owns the engine and answers each request once; `whisper_stream` is
decoupled, sends each segment as soon as it is known, and passes its requests on through
`serve.triton.relay`. `execute` copies a request's tensors out, starts it and returns; its response
sender lives on in a `Responder`.
"""
