"""Groups: from played episodes over credit and filters to a batch of samples."""
