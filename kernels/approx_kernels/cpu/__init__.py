"""C for CPUs: compiling it, and the structures that it reads."""
