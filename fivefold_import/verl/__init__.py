"""verl's configurations, whose key tree siiRL and Trinity-RFT took over."""
