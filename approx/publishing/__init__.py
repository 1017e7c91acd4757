"""Records in, what people read out. Needs no torch and reads nothing but the record."""
