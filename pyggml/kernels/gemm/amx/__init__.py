"""Matrix products on Intel's tiles (AMX): registers of 16 rows of 64 bytes, which hold bfloat16.

tiles     their instructions, and the microkernel C[32, 32] (+)= A · B
rows      float32 and weights as rows and pairs of bfloat16
product   products with weights of any type

Whether a process may use them is in pyggml.jit.isa.
"""
