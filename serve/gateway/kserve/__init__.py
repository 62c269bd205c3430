"""KServe v2 over HTTP and gRPC."""
