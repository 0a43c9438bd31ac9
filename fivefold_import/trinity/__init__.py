"""Trinity-RFT's configurations."""
