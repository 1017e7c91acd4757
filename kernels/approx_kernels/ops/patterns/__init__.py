"""The sparse patterns as dense masks: the specification of the ops, and the source of plots and figures."""
