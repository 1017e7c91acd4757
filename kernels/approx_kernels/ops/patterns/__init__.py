"""The sparse patterns as dense masks: the specification of the ops, and what plots and figures are made from."""
