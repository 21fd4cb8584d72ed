"""TinyLoop: 4-bit asymmetric language models, looped and ordinary, from file to perplexity and text."""

__version__ = "0.1.0"
