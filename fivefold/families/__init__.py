"""What Fivefold knows of each model family: its configuration, its sizes and its tensor names. No torch."""
