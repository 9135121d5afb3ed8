"""The HTTP server of `specjax.serve`, which answers requests with one engine."""
