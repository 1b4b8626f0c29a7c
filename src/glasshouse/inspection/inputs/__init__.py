"""What the tools take: texts, a forward pass, and the input of one stack."""
