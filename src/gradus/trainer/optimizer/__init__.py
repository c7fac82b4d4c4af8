"""From gradients to new weights: the schedule, the update rules, the gate for NaN."""
