"""NVIDIA GPUs: kernels in `kernels/*.cu`, compiled at first use, and the code that launches them.

Nothing here is imported before a tensor on a CUDA device asks for it, and nothing needs a GPU to be imported.
"""
