"""Run april inside existing trainers: one package per trainer, which imports the trainer only when it is used."""
