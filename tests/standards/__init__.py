"""What two iterations of two recipes compute, number by number, so that no change is silent."""
