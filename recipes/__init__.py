"""Entry points: thin scripts that put a config, a pipeline and a trainer together."""
