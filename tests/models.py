"""Where the tests' real models come from: GGUF files inside PyPI packages."""
