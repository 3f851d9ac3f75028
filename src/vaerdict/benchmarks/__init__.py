"""Speed and accuracy beside the peers, measured in the same run."""
