"""Files of prime-rl as configs of gradus, behind `gradus convert`; only that command imports it."""
