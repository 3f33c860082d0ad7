"""Process groups for sending tensors, shared by april's sender and the workers of engines."""
