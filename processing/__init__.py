"""Raw media and text -> tensors: image, video and joint processors, media loading, patch geometry."""
