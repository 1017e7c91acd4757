"""C for CPUs: compiled where there is a compiler, and the structures that it reads."""
