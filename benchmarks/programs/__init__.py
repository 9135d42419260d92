"""Programs that train the models of `benchmarks.tasks`, one file a package, each as its users write it.

`train(data, model, epochs, lr)` trains the model in place: the arrays of `data` come from NumPy, the schedule is one
cycle to the rate `lr`, and the loss and a score of the validation part are shown every epoch."""
