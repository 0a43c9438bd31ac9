"""Pictures of a plan, as SVG and HTML."""
