"""What models that see images compute besides: features of images, and the positions of tokens around them."""
