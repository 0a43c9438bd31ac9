"""Renderings of a plan: tables on a terminal, JSON, an SVG picture and an HTML page."""
