"""Games on small boards, which are played in words."""
