"""Several engines behind one front: replicas of a model, each in a process of its own."""
