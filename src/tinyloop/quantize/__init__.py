"""From dense weights to 4-bit ones: rounding and GPTQ for one weight (gptq), a model block by block (pipeline)."""
