"""What a step's row says, part by part (`algorithms.md` section 10); every figure is a function of `algorithms`."""
