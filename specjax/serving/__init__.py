"""The HTTP server of `specjax.serve`, over one engine."""
