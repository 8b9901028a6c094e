"""From a Plan to a Worker that runs it on real tensors."""
