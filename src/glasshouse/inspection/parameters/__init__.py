"""What can be read from the parameters alone: weights by head, their low-rank products, and the nearest tokens."""
