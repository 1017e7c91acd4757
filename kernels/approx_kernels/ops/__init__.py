"""The ops: each a folder with its public function in api.py, its specification in reference.py, and its kernels."""
