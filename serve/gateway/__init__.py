"""The one process that clients reach: KServe v2 over HTTP and gRPC, limits, health, draining."""
