"""`pytest --benchmark-only` measures, benchmarks.report shows, benchmarks.gpu runs all on a GPU."""
