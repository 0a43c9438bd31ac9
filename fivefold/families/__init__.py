"""Model families: how their configs are read, the sizes that follow, and their tensor names. No torch."""
