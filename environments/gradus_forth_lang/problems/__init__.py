"""Problems by tier, each with a reference solution and cases that were computed in Python."""
