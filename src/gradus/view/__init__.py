"""`gradus view`: runs in a browser, from their folders, while they run or later."""
