"""The processes of a learner with several ranks: started by torchrun, called like an object."""
