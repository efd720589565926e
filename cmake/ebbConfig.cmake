# What find_package(ebb) runs: target ebb::ebb, with LibTorch as FindEbbTorch.cmake finds it.
include(CMakeFindDependencyMacro)
list(PREPEND CMAKE_MODULE_PATH ${CMAKE_CURRENT_LIST_DIR})
find_dependency(EbbTorch)
find_dependency(Threads)
list(REMOVE_ITEM CMAKE_MODULE_PATH ${CMAKE_CURRENT_LIST_DIR})
include(${CMAKE_CURRENT_LIST_DIR}/ebbTargets.cmake)
