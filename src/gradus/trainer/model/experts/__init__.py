"""A mixture's experts: grouped matrix products, and experts that are split over ranks."""
