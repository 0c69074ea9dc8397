"""What decoders run on: NumPy arrays, LLVM vectors, LLVM lanes, and source code for devices."""
