"""From batches to a model: objective, update, optimizer, schedule."""
