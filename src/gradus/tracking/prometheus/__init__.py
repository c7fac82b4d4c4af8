"""The numbers of a run for Prometheus: names, the page that is scraped, a dashboard."""
