"""The CPU backend: exact fp32 kernels compiled by LLVM (through numba), and the fused decode step built of them."""
